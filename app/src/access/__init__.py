"""Who may ask for what, and which rows they may see. Knows no HTTP framework."""
