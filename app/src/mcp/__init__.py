"""Tools for agents over the Model Context Protocol. The SDK is imported here and nowhere else."""
