"""Sources over another source: experts' matrices one by one, adapters applied, quantized codes."""
