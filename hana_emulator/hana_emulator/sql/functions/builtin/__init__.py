"""What HANA's SQL functions compute, as plain functions over storage values; knows nothing of SQLite or of parsing."""
