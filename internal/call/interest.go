package call

import (
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// Interest stores the interests of a node.
type Interest struct {
	Silent
	Node  string
	Wants keys.InterestValue
	Gone  bool // the node was removed
}

func (b *Interest) Append(dst []byte) []byte {
	dst = wire.AppendBool(wire.AppendUint(wire.AppendBytes(dst, b.Node), b.Wants.Kinds), b.Gone)
	return wire.AppendUint(wire.AppendUint(dst, b.Wants.Incarnation), b.Wants.Number)
}

func (b *Interest) Read(r *wire.Reader) {
	b.Node, b.Wants.Kinds, b.Gone = r.String(), r.Uint(), r.Bool()
	b.Wants.Incarnation, b.Wants.Number = r.Uint(), r.Uint()
}
