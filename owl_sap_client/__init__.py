"""A typed client of owl-sap-connector's REST API, on httpx. Stands alone: imports nothing else of this project."""
