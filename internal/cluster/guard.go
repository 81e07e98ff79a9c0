package cluster

import "codeq/internal/guard"

// contain calls f, a function of this package; a panic is logged, and passed to caught as an error.
// caught is nil if nothing depends on f.
func (n *Node) contain(what string, f func(), caught func(error)) {
	guard.Contain(n.log, what, f, func(value any, stack []byte) {
		if caught != nil {
			caught(n.c.PanicError(what, value, stack))
		}
	})
}

// guarded calls f, and returns its error; a panic is logged, and becomes an error.
func (n *Node) guarded(what string, f func() error) (err error) {
	n.contain(what, func() { err = f() }, func(caught error) { err = caught })
	return err
}
