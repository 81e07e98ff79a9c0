package store

import (
	"codeq/internal/keys"
	"codeq/internal/record"
)

// ParentWaits is the outcome of a parent that a task goes on to wait for. It is not in messages.
const ParentWaits = keys.ParentEnded + 1

// ParentPolicy decides how a task goes on when a parent has ended: its OnDead and, in the upper
// half, its OnMissing.
type ParentPolicy byte

const (
	missingShift = 4
	// OfSibling is added for a parent of the same batch, newly produced in another shard. If the
	// parent is gone already, its outcome counts, as long as it is known.
	OfSibling ParentPolicy = 1 << 3
)

// ParentPolicyOf returns that of a task.
func ParentPolicyOf(r *record.Record) ParentPolicy {
	return ParentPolicy(r.OnDead | r.OnMissing<<missingShift)
}

// OnDead returns the policy of a task without a missing parent.
func (p ParentPolicy) OnDead() ParentPolicy { return p & (OfSibling - 1) }

// OutcomeOf returns the outcome of a parent for a task, by the parent's state; 0: it is gone.
func (p ParentPolicy) OutcomeOf(parent record.TaskState) byte {
	if p.OnDead() == keys.AtAnyEnd && (parent == 0 || parent >= record.Dead) {
		return keys.ParentEnded
	}
	switch parent {
	case record.Done:
		return keys.ParentDone
	case record.Canceled:
		return keys.ParentCanceled
	case record.Dead:
		switch p.OnDead() {
		case keys.HoldOnDead:
			return ParentWaits
		case keys.RunOnDead:
			return keys.ParentDone
		default:
			return keys.ParentCanceled
		}
	case 0:
		if p>>missingShift == keys.RunOnMissing {
			return keys.ParentDone
		}
		return keys.ParentCanceled
	default:
		return ParentWaits
	}
}
