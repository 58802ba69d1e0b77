"""What two or more stages share; importable from any working directory without an install."""
