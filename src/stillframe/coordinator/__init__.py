"""The driver's side: carries out what protocol/ decides."""
