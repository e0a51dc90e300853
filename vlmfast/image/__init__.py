"""Pictures: from whatever the user has to upright RGB pixels, and from those to a checkpoint's tiles."""
