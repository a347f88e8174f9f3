"""Quality of search: measures of rankings, labelled queries, comparison of two reports, recall of a vector index."""
