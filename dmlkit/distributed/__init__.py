"""One process or many: devices, ranks, what they share, and stopping all of them at one step."""
