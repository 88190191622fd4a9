"""Random crops, and their application on the CPU or on a device."""
