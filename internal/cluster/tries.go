package cluster

import (
	"context"
	"errors"
	"fmt"

	"codeq/internal/base"
)

// Tries are the tries of a call on its way to the leader of its shard, and the meaning of their
// errors.
type Tries struct {
	Group     *Group
	Reads     bool // the call changes nothing
	EndsLease bool // the first try that is applied ends the lease, and later ones find it lost
	Patience  base.Patience

	doubt error // of an earlier try, which may have been applied; nil: none may
	last  error // of the try before; nil: this is the first
}

// Failed returns true when another try makes sense: after a pause, or when change is closed.
// Otherwise it returns the error for the caller. A call that may have been applied is tried again
// only if it is repeatable.
func (t *Tries) Failed(ctx context.Context, err error, repeatable bool, change <-chan struct{}) (again bool, _ error) {
	removed := IsRemoval(err)
	err = t.weigh(ctx, err)
	repeats := errors.Is(err, base.ErrNotLeader) || errors.Is(err, base.ErrUncertain) && repeatable
	if !repeats || removed || ctx.Err() != nil || t.Group.node.ctx.Err() != nil || !t.Patience.Wait(ctx, change) {
		return false, t.explain(ctx, err, repeats)
	}
	t.last = err
	return true, nil
}

// weigh returns the meaning of the error of a try, together with the tries before.
func (t *Tries) weigh(ctx context.Context, err error) error {
	uncertain := errors.Is(err, base.ErrUncertain)
	if t.Group.node.ctx.Err() != nil && !IsRemoval(err) { // a call may meet the end of a connection before that of the node
		notLeader := errors.Is(err, base.ErrNotLeader)
		if t.Reads && (uncertain || notLeader) || notLeader && !uncertain && t.doubt == nil {
			return base.ErrClosed
		}
	}
	switch {
	case uncertain:
		t.doubt = err
	case t.doubt == nil:
	case !wasResolved(err) || ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return t.doubt // this try was not applied, which says nothing of the one before
	case errors.Is(err, base.ErrLeaseLost) && t.EndsLease:
		return t.doubt // by the one before, perhaps
	}
	return err
}

// Outcome returns the meaning of the outcome of one of many calls that are tried together, after a
// try that was resolved.
func (t *Tries) Outcome(err error, endsLease bool) error {
	if t.doubt != nil && endsLease && errors.Is(err, base.ErrLeaseLost) {
		return t.doubt
	}
	return err
}

// explain returns the error for the caller, after the last try.
func (t *Tries) explain(ctx context.Context, err error, repeats bool) error {
	ended := ctx.Err()
	err = t.Group.Late(err, t.Reads)
	switch {
	case t.last != nil && errors.Is(err, base.ErrLate) && errors.Is(err, base.ErrNotLeader):
		return t.last
	case ended == nil:
	case repeats && !errors.Is(err, ended):
		return fmt.Errorf("%w: %w", err, base.EndOf(ctx))
	case t.last != nil && errors.Is(err, ended) && !errors.Is(err, base.ErrUncertain):
		return fmt.Errorf("%w: %w", t.last, err)
	}
	return err
}
