"""Static prediction: binary facts and the roofline-and-occupancy cost model."""
