"""Load generator and comparison of arms: `sweep` says how it is run fairly."""
