"""Formulas of curved spaces that stay exact in float32."""
