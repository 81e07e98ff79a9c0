//go:build !linux && !darwin

package platform

// BootID returns nothing: what other systems tell changes with their clock as well.
func BootID() string { return "" }
