"""The measurements of `python -m app.src.core.t4_gpu_optimizer`: matrix products, sustained load, embedding."""
