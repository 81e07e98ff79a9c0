package keys

import (
	"fmt"

	"codeq/internal/base"
)

// CallNumber identifies a produce of a node. The zero CallNumber is none.
type CallNumber struct {
	Node        string
	Incarnation uint64 // of the node: a run of its process, or a part of it; later ones are larger
	Seq         uint64 // from 1
	Low         uint64 // the node knows the outcomes of all calls below it
}

// IncarnationOverError refuses a call of an earlier incarnation of a node. It was not decided.
type IncarnationOverError struct {
	Node   string
	Latest uint64 // the latest incarnation of the node that the shard knows
}

func (e *IncarnationOverError) Error() string {
	const why = "was removed, or opened again, after the call had begun"
	return fmt.Sprintf("%v: node %q %s", base.ErrNotMember, e.Node, why)
}

func (e *IncarnationOverError) Unwrap() error { return base.ErrNotMember }
