"""`tastemaker verify`: whether models and rewards compute on this machine what their libraries and authors compute."""
