//go:build !nextformat

package engine

// sealNextFormat is for the build that knows the next format.
func (r *round) sealNextFormat() {}
