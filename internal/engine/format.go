//go:build !nextformat

package engine

// sealNextFormat is for the build that knows the next format.
func (s *State) sealNextFormat() {}
