"""Formulas of curved spaces that remain accurate in float32."""
