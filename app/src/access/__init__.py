"""Authentication, scopes, rate limits, and row rights."""
