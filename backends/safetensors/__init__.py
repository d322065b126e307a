"""safetensors files, and Hugging Face folders of them."""
