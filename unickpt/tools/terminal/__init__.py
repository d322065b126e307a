"""What commands share, also those of plug-ins: output, options, tables."""
