"""kvtier inside inference engines. Each module needs its engine and nothing else of this package does."""
