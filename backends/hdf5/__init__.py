"""HDF5 files, of Keras and others, without libhdf5."""
