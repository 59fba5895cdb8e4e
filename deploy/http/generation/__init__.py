"""From a request, whatever API it came by, to what its sequences give."""
