"""Devices and distributed processes: ranks, exchange of data, and stopping all ranks at the same step."""
