"""Running programs on devices, and simulating them on a cost model."""
