"""What `python -m app.src.core.t4_gpu_optimizer` measures: matrix products, sustained load, embedding."""
