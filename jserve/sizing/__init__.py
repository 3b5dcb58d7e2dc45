"""What a model would need and reach on given devices, without them: ``jserve plan``."""
