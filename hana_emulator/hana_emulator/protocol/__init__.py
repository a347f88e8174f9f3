"""Server-side codec of HANA's SQL command network protocol: bytes to storage values and back."""
