package codeq

import "fmt"

// lookupOp does something with a task that it finds by its ID.
type lookupOp struct {
	completion
	id ID
	// do decides; at is nil if the task does not exist.
	do func(s *shard, at *located) error
}

// resolveAs resolves the lookup of an operation that embeds it.
func (op *lookupOp) resolveAs(s *shard, whole finder) {
	if s.isBehind(op.id) {
		s.postponeOp(whole)
		return
	}
	at, err := s.locate(op.id)
	switch {
	case err != nil:
		s.broken = err
	case at == nil:
		op.err = fmt.Errorf("%w: %s", ErrNotFound, op.id)
	case whole.alters() && s.isTelling(op.id):
		op.err = s.errNoRoom()
	default:
		op.err = op.do(s, at)
	}
	if !whole.isWaiting() {
		s.settle(whole)
	}
}

// finder is an operation that embeds a lookupOp.
type finder interface {
	operation
	isWaiting() bool // it will be settled by somebody else
	alters() bool    // it may change the task
}

func (op *lookupOp) isWaiting() bool { return false }

func (op *lookupOp) alters() bool { return true }
