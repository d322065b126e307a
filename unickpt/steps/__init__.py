"""The steps of a run as they are stored: folders, tiers, leases, and what crashed jobs left."""
