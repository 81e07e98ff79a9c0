package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"codeq/internal/peer"
)

// Answer is the answer of a node to AskNodes.
type Answer struct {
	Node string
	Body []byte
	Err  error // why there is no answer: the node may have got the question nevertheless
}

// Read decodes an answer in JSON.
func (a *Answer) Read(v any) error {
	if a.Err != nil {
		return a.Err
	}
	return json.Unmarshal(a.Body, v)
}

// AskNodes asks all other members of any group, as far as this node knows, and returns their
// answers by name. It waits for them for CallTimeout, or until ctx ends.
func (n *Node) AskNodes(ctx context.Context, body []byte) []Answer {
	ctx, cancel := context.WithTimeout(ctx, n.c.CallTimeout)
	defer cancel()
	others := slices.DeleteFunc(n.known(), func(p Peer) bool { return p.Node == n.self.Node })
	answers := make([]Answer, len(others))
	for i, err := range n.together("question for a node", len(others), func(i int) (err error) {
		answers[i].Body, err = n.askNode(ctx, others[i], body)
		return err
	}) {
		answers[i].Node, answers[i].Err = others[i].Node, err
	}
	slices.SortFunc(answers, func(a, b Answer) int { return cmp.Compare(a.Node, b.Node) })
	return answers
}

// AskNodesAside is AskNodes without a wait. answered gets the answers that have come within
// asideFor, on another goroutine, or none if the node ends meanwhile. If it panics, it is called
// again, without answers.
func (n *Node) AskNodesAside(body []byte, answered func(bodies [][]byte)) {
	n.background.Go(func() {
		var bodies [][]byte
		n.contain("question for all nodes", func() {
			ctx, cancel := context.WithTimeout(n.ctx, asideFor)
			defer cancel()
			for _, a := range n.AskNodes(ctx, body) {
				if a.Err == nil {
					bodies = append(bodies, a.Body)
				}
			}
		}, nil)
		n.contain("answers of all nodes", func() { answered(bodies) }, func(error) {
			n.contain("answers of all nodes", func() { answered(nil) }, nil)
		})
	})
}

// asideFor bounds AskNodesAside.
const asideFor = 2 * time.Second

func (n *Node) askNode(ctx context.Context, p Peer, body []byte) ([]byte, error) {
	p, _ = n.current(p)
	to, err := p.target()
	if err != nil {
		return nil, err
	}
	reply, err := n.peer.Call(ctx, to, kindAnyNode, body)
	if err != nil {
		err = fmt.Errorf("node %q: %w", p.Node, n.callError(ctx, err))
	}
	return reply, err
}

// serveAnyNode calls ServeNode of the host, on another goroutine. It refuses a node that was
// removed from the cluster and does not know; it refuses all nodes as long as this node does not
// know the members.
func (n *Node) serveAnyNode(r *peer.Request) error {
	if members, err := n.groups[0].members(); err == nil && len(members) == 0 {
		return n.groups[0].noLeader()
	}
	if !slices.ContainsFunc(n.groups, func(g *Group) bool { return g.HasDirectory(r.From.ID) }) {
		return RemovedError(0, r.From.Name)
	}
	ctx, cancel := context.WithTimeout(n.ctx, n.c.CallTimeout)
	r.OnCancel(cancel)
	n.answer(r, "answer of a node", func() ([]byte, error) {
		defer cancel()
		return n.c.ServeNode(ctx, r.Body)
	})
	return nil
}
