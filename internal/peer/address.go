package peer

import (
	"context"
	"errors"
	"slices"
	"time"

	"codeq/internal/base"
)

// The address of a node is a hint: the ID of its directory decides, which the handshake compares.
// If a node is not at the address of a target, Config.Addresses gives other possible addresses; and
// the address where it was found is tried first the next time.

// addressesOf are the possible addresses of a node, in the order of the attempts.
func (n *Node) addressesOf(to Target) []string {
	n.mu.Lock()
	last := n.moved[to.ID]
	n.mu.Unlock()
	var addresses []string
	for _, a := range append([]string{last, to.Address}, n.c.Addresses(to)...) {
		if a != "" && !slices.Contains(addresses, a) {
			addresses = append(addresses, a)
		}
	}
	return addresses
}

// dialMoved opens a connection to a node, at any of its addresses. ctx has a deadline: each address
// gets its share of the time that is left. An error is that of the target's address.
func (n *Node) dialMoved(ctx context.Context, to Target, h header) (c *conn, err error) {
	addresses := n.addressesOf(to)
	for i, address := range addresses {
		end, _ := ctx.Deadline()
		share, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(len(addresses)-i))
		c, failure := n.dialTold(share, Target{to.ID, to.Name, address}, h)
		cancel()
		if failure == nil {
			n.found(to, address)
			return c, nil
		}
		if err == nil || address == to.Address {
			err = failure
		}
		if isThere(failure) || ctx.Err() != nil {
			return nil, failure
		}
	}
	return nil, err
}

// found stores the address of a node.
func (n *Node) found(to Target, address string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if address == to.Address {
		delete(n.moved, to.ID)
	} else {
		n.moved[to.ID] = address
	}
}

// isThere reports whether a connection has failed although the target node has the address.
func isThere(err error) bool {
	if errors.Is(err, base.ErrOldCopy) || errors.Is(err, ErrEarly) || errors.Is(err, ErrClosed) {
		return true
	}
	refused, ok := errors.AsType[*RefusedError](err)
	return ok && slices.Contains([]Reason{RefusedVersion, RefusedFormat, RefusedCopy, RefusedBusy, RefusedEarly}, refused.Reason)
}
