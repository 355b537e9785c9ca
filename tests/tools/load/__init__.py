"""Load and measurements: programs that print what they found; the tests run some of them, small."""
