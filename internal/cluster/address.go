package cluster

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/hashicorp/raft"

	"codeq/internal/peer"
)

// Each shard stores the addresses of its members; AddNode changes them. A node that has moved is
// found nevertheless: it sends its new address to the other members as long as they have an old
// one, and nodes look for each other at the addresses of their Peers. So one node may move, or all
// at once, and AddNode then updates the shards.

// hints are the addresses that other nodes have sent.
type hints struct {
	mu sync.Mutex // guards at
	at map[peer.ID]string
}

// maxHints bounds hints.
const maxHints = 1000

func (h *hints) set(id peer.ID, address string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at == nil || len(h.at) >= maxHints {
		h.at = make(map[peer.ID]string)
	}
	h.at[id] = address
}

func (h *hints) of(id peer.ID) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.at[id]
}

// addresses is peer.Config.Addresses.
func (n *Node) addresses(to peer.Target) (addresses []string) {
	if a := n.hints.of(to.ID); a != "" {
		addresses = append(addresses, a)
	}
	for _, p := range n.c.Peers {
		if p.Node == to.Name {
			addresses = append(addresses, p.Address)
		}
	}
	return addresses
}

// tellAddress sends the address of this node to the other members, if a shard has an old one.
func (n *Node) tellAddress(ctx context.Context, others []Peer) {
	if !slices.ContainsFunc(n.groups, func(g *Group) bool { return g.formerAddress() != "" }) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, n.c.HeartbeatTimeout)
	defer cancel()
	n.together("address of this node", len(others), func(i int) error {
		to, err := others[i].target()
		if err == nil {
			_, err = n.peer.Call(ctx, to, kindAddress, []byte(n.self.Address))
		}
		return err // it is ignored: the address is sent again
	})
}

// serveAddress stores the address of another node.
func (n *Node) serveAddress(r *peer.Request) error {
	if address := string(r.Body); address == "" || len(address) > MaxAddress {
		return ErrMalformedCall
	}
	n.hints.set(r.From.ID, string(r.Body))
	r.Reply(nil)
	return nil
}

// formerAddress is the address that the shard has for this node, if it is an old one; else "".
func (g *Group) formerAddress() string {
	members, err := g.members()
	if err != nil {
		return ""
	}
	self := g.node.self
	at := slices.IndexFunc(members, func(m raft.Server) bool { return m.ID == self.ServerID() })
	if at < 0 || peerOf(members[at]).Address == self.Address {
		return ""
	}
	return peerOf(members[at]).Address
}

// explainMove adds to an error that the shard has an old address of this node.
func (g *Group) explainMove(err error) error {
	if from := g.formerAddress(); from != "" {
		return fmt.Errorf("%w: the cluster knows this node at %s, and it is at %s: AddNode of its name and new address, on any node, tells the others",
			err, from, g.node.self.Address)
	}
	return err
}
