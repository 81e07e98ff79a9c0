package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) clusterCommand() *cli.Command {
	c := &cli.Command{
		Name: "cluster", Category: categoryCluster, Usage: "see the nodes of a cluster, move leaders, change the members",
		Description: "A node of the cluster must be open on this machine, and serve its directory (-dir). With -url,\n" +
			"status, transfer, drain and undrain work.",
		Commands: []*cli.Command{
			{Name: "status", Usage: "the leader and the replicas of each shard", Action: a.clusterStatus},
			{
				Name: "transfer", ArgsUsage: "SHARD NODE", Usage: "transfer the leader of a shard to a node; NODE \"\": any", Flags: dryRunFlag(),
				Action: a.clusterTransfer,
			},
			{
				Name: "drain", Usage: "move all leaders away from the node of -dir or -url, before maintenance",
				Action: a.clusterDo(func(ctx context.Context, q steerer) error { return q.Drain(ctx) }, "drained"),
			},
			{
				Name: "undrain", Usage: "undo drain",
				Action: a.clusterDo(func(ctx context.Context, q steerer) error { return q.Undrain(ctx) }, "undrained"),
			},
			{
				Name: "add", ArgsUsage: "NODE ADDRESS", Usage: "add an open node that waits for its cluster", Flags: dryRunFlag(),
				Action: a.clusterMember("added", func(ctx context.Context, q *codeq.Queue, args []string) error {
					return q.AddNode(ctx, codeq.Peer{Node: args[0], Address: args[1]})
				}),
			},
			{
				Name: "remove", ArgsUsage: "NODE", Usage: "remove a node from the cluster permanently", Flags: dryRunFlag(),
				Action: a.clusterMember("removed", func(ctx context.Context, q *codeq.Queue, args []string) error {
					return q.RemoveNode(ctx, args[0])
				}),
			},
		},
	}
	c.Action = a.group(c)
	return c
}

func (a *app) clusterStatus(ctx context.Context, c *cli.Command) error {
	return a.withServed(ctx, c, func(q steerer) error {
		s, err := q.ClusterStatus(ctx)
		if err != nil {
			return err
		}
		if a.asJSON {
			return a.json(s)
		}
		if err := a.line("Cluster %s, as node %s sees it", s.Cluster, s.Node); err != nil {
			return err
		}
		return a.table(clusterTable(s))
	})
}

func clusterTable(s *codeq.ClusterStatus) *table {
	t := newTable(">SHARD", "NODE", "ADDRESS", "ROLE", ">TERM", ">APPLIED", ">LAG", "CONTACT", ">CLOCK", "STATE")
	for _, shard := range s.Shards {
		for _, r := range shard.Replicas {
			role, contact, state := "follower", short(r.LastContact)+" ago", ""
			switch {
			case r.Node == shard.Leader:
				role, contact = "leader", ""
			case !r.Voter:
				role = "learner"
			}
			switch {
			case r.LastError != "":
				contact, state = "", clip(r.LastError, payloadCells)
			case r.Suspect:
				state = "suspect"
			case r.Drained:
				state = "drained"
			}
			if shard.Placed == r.Node {
				role += " (placed)"
			}
			t.add(shard.Shard, r.Node, r.Address, role, r.Term, r.Applied, r.Lag, contact, r.ClockAhead.Round(1e6), state)
		}
	}
	return t
}

// clusterResult is the JSON output of the verbs that change the cluster.
type clusterResult struct {
	Done   string
	Shard  *int   `json:",omitempty"`
	Node   string `json:",omitzero"`
	DryRun bool   `json:",omitzero"`
}

func (a *app) clusterTransfer(ctx context.Context, c *cli.Command) error {
	args := c.Args().Slice()
	shard, err := strconv.Atoi(args[0])
	if err != nil {
		return usagef(c, "SHARD %q is not a number", args[0])
	}
	return a.withServed(ctx, c, func(q steerer) error {
		r := clusterResult{Done: "transferred", Shard: &shard, Node: args[1], DryRun: c.Bool("dry-run")}
		if r.DryRun {
			s, err := q.ClusterStatus(ctx)
			if err != nil {
				return err
			}
			if shard < 0 || shard >= len(s.Shards) {
				return usagef(c, "there is no shard %d", shard)
			}
			if args[1] != "" && !isMember(s, args[1]) {
				return fmt.Errorf("%w: node %q", codeq.ErrNotFound, args[1])
			}
			return a.result(r, "shard %d, which %s leads, would be led by %q", shard, s.Shards[shard].Leader, args[1])
		}
		if err := q.TransferLeadership(ctx, shard, args[1]); err != nil {
			return err
		}
		return a.result(r, "shard %d is led by %q", shard, args[1])
	})
}

func isMember(s *codeq.ClusterStatus, node string) bool {
	for _, shard := range s.Shards {
		for _, r := range shard.Replicas {
			if r.Node == node {
				return true
			}
		}
	}
	return false
}

func (a *app) clusterDo(do func(context.Context, steerer) error, done string) cli.ActionFunc {
	return func(ctx context.Context, c *cli.Command) error {
		return a.withServed(ctx, c, func(q steerer) error {
			if err := do(ctx, q); err != nil {
				return err
			}
			return a.result(clusterResult{Done: done}, "the node is %s", done)
		})
	}
}

// clusterMember changes the members, by the process of a running node.
func (a *app) clusterMember(done string, do func(context.Context, *codeq.Queue, []string) error) cli.ActionFunc {
	return func(ctx context.Context, c *cli.Command) error {
		args := c.Args().Slice()
		t, err := a.directory(c)
		if err != nil {
			return err
		}
		q, err := t.local(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = q.Close() }() // the connection only
		r := clusterResult{Done: done, Node: args[0], DryRun: c.Bool("dry-run")}
		if r.DryRun {
			s, err := q.ClusterStatus(ctx)
			if err != nil {
				return err
			}
			if member := isMember(s, args[0]); member == (done == "added") {
				return coded(exitRefused, fmt.Errorf("node %q: member: %t", args[0], member))
			}
			return a.result(r, "node %s would be %s", args[0], done)
		}
		if err := do(ctx, q, args); err != nil {
			return err
		}
		return a.result(r, "node %s is %s", args[0], done)
	}
}
