"""REST over the service. The only place that knows fastapi; HTTP statuses stand in `errors` alone."""
