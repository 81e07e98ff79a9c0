package dispatch

import (
	"slices"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// How claims and their grants travel between nodes.

// Append appends the request of a claim.
func (c *Claim) Append(dst []byte) []byte {
	queues, weights := c.named()
	dst = wire.AppendStrings(dst, queues)
	dst = keys.AppendIndexes(dst, weights)
	dst = wire.AppendUint(dst, c.Duration)
	dst = wire.AppendUint(dst, uint64(c.Max))
	dst = wire.AppendBool(wire.AppendBool(dst, c.NoWait), c.Holder.Local)
	if c.Holder.Handled || c.Holder.Worker != "" {
		dst = wire.AppendBytes(dst, c.Holder.Worker)
	}
	if c.Holder.Handled {
		dst = wire.AppendUint(wire.AppendBool(dst, true), c.Holder.Process)
	}
	return dst
}

// Read reads what Append has written, into a new claim. The lengths of its names are not checked.
func (c *Claim) Read(r *wire.Reader) {
	c.Queues, c.Weights = r.Strings(), keys.ReadIndexes(r)
	c.Duration, c.Max = r.Uint(), int(r.Uint())
	c.NoWait, c.Holder.Local = r.Bool(), r.Bool()
	if r.Len() > 0 {
		c.Holder.Worker = r.String()
	}
	if r.Len() > 0 {
		c.Holder.Handled, c.Holder.Process = r.Bool(), r.Uint()
	}
	if len(c.Weights) != 0 && len(c.Weights) != len(c.Queues) ||
		slices.ContainsFunc(c.Weights, func(w int) bool { return !isWeight(w) }) {
		r.Fail()
	}
}

// AppendReply appends the grants of a claim.
func (c *Claim) AppendReply(dst []byte) []byte {
	dst = wire.AppendUint(dst, uint64(len(c.Grants)))
	for i := range c.Grants {
		g := &c.Grants[i]
		dst = wire.AppendUint(append(dst, g.Receipt.ID[:]...), g.Receipt.Token)
		dst = wire.AppendBytes(dst, g.Queue)
		dst = wire.AppendBytes(dst, g.Tenant)
		dst = append(dst, g.Priority)
		dst = wire.AppendUint(dst, uint64(g.Wait)<<32|uint64(g.Attempt))
		dst = wire.AppendUint(dst, g.Deadline)
		dst = wire.AppendBytes(dst, g.Rec)
	}
	if slices.ContainsFunc(c.Grants, func(g engine.Grant) bool { return g.Timeout != 0 }) {
		for i := range c.Grants {
			dst = wire.AppendUint(dst, c.Grants[i].Timeout)
		}
	}
	return dst
}

// ReadReply reads what AppendReply has written. It shares the names between consecutive grants of
// one lane.
func (c *Claim) ReadReply(r *wire.Reader) {
	last := new(engine.LaneKey)
	for range r.Count(keys.IDLen + 7) {
		g := engine.Grant{Receipt: engine.Receipt{ID: keys.ReadID(r), Token: r.Uint()}}
		key := engine.LaneKey{Queue: r.String(), Tenant: r.String(), Priority: r.Byte()}
		if *last != key {
			last = new(key)
		}
		counts := r.Uint()
		g.LaneKey, g.Attempt, g.Wait = last, uint32(counts), uint32(counts>>32)
		g.Deadline, g.Rec = r.Uint(), r.Bytes()
		c.Grants = append(c.Grants, g)
	}
	if r.Len() > 0 { // policies of queues set some
		for i := range c.Grants {
			c.Grants[i].Timeout = r.Uint()
		}
	}
}

// Again does nothing: a claim is sent once.
func (c *Claim) Again() {}
