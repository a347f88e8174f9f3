"""HANA's SQL functions as plain functions over storage values."""
