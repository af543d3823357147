"""GraphDefs as Linen variables hold them: their leaves, their structure, and templates of them."""
