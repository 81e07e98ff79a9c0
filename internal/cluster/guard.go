package cluster

import (
	"context"
	"sync"

	"codeq/internal/guard"
)

// contain calls f, a function of this package; a panic is logged, and passed to caught as an error.
// caught is nil if nothing depends on f.
func (n *Node) contain(what string, f func(), caught func(error)) {
	guard.Contain(n.log, what, f, func(value any, stack []byte) {
		if caught != nil {
			caught(n.c.PanicError(what, value, stack))
		}
	})
}

// run is contain on a goroutine that only Close waits for.
func (n *Node) run(what string, f func(), caught func(error)) {
	n.background.Go(func() { n.contain(what, f, caught) })
}

// watch is run for a goroutine that ends before the groups do.
func (n *Node) watch(what string, f func(), caught func(error)) {
	n.watches.Go(func() { n.contain(what, f, caught) })
}

// guarded calls f, and returns its error; a panic is logged, and becomes an error.
func (n *Node) guarded(what string, f func() error) (err error) {
	n.contain(what, func() { err = f() }, func(caught error) { err = caught })
	return err
}

// together calls f for each number below count at the same time, and returns the errors when all
// calls have returned.
func (n *Node) together(what string, count int, f func(i int) error) []error {
	errs := make([]error, count)
	var running sync.WaitGroup
	for i := range errs {
		running.Go(func() { errs[i] = n.guarded(what, func() error { return f(i) }) })
	}
	running.Wait()
	return errs
}

// firstOf calls functions at the same time, and returns the first result. The ctx of the others
// ends then. ok is false if none has a result.
func firstOf[R any](ctx context.Context, n *Node, what string, fs []func(context.Context) (R, bool)) (result R, ok bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan R, 1)
	n.together(what, len(fs), func(i int) error {
		if r, ok := fs[i](ctx); ok {
			select {
			case results <- r:
			default: // another one was first
			}
			cancel()
		}
		return nil
	})
	select {
	case result = <-results:
		return result, true
	default:
		return result, false
	}
}

// put sets an element of a map, which may be nil.
func put[K comparable, V any](m *map[K]V, key K, value V) {
	if *m == nil {
		*m = make(map[K]V)
	}
	(*m)[key] = value
}
