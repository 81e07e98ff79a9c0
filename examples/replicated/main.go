// Command replicated runs a replicated queue on three nodes: processes of this machine, connected
// over loopback. All of them produce tasks and work on them. One after another is killed with
// SIGKILL and started again; at the end, the acknowledged tasks are compared with the done ones.
//
//	replicated [-for TIME] [-kill INTERVAL] [-rate N] [-workers N] [-port PORT] [-dir DIR]
//
// The exit status is 1 if a task was lost. node.go is a node as in a real service; the rest starts
// nodes, kills them and counts.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"codeq"
)

const nodes = 3

type config struct {
	dir     string
	port    int
	rate    int
	workers int
	length  time.Duration
	kill    time.Duration
}

// name returns the name of the i-th node, from 1.
func (c *config) name(i int) string { return fmt.Sprint("node-", i) }

func (c *config) address(i int) string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port+i-1))
}

// peers returns the initial nodes of the cluster.
func (c *config) peers() (peers []codeq.Peer) {
	for i := 1; i <= nodes; i++ {
		peers = append(peers, codeq.Peer{Node: c.name(i), Address: c.address(i)})
	}
	return peers
}

// path returns the path of a file of a node.
func (c *config) path(i int, what string) string { return filepath.Join(c.dir, c.name(i)+what) }

func main() {
	var c config
	flag.StringVar(&c.dir, "dir", "",
		"keep the nodes' queues and notes in `DIR`, and go on with what is there; default: a temporary one")
	flag.IntVar(&c.port, "port", 7400, "the nodes listen on 127.0.0.1, on `PORT` and the next two")
	flag.IntVar(&c.rate, "rate", 200, "each node produces `N` tasks a second")
	flag.IntVar(&c.workers, "workers", 16, "each node runs `N` handlers at a time")
	flag.DurationVar(&c.length, "for", 20*time.Second, "stop producing after this `TIME`")
	flag.DurationVar(&c.kill, "kill", 4*time.Second, "kill a node each `INTERVAL`; 0: never")
	node := flag.Int("node", 0, "be the node with this `NUMBER`; what the command starts itself with")
	flag.Parse()
	if c.rate < 1 {
		fmt.Fprintln(os.Stderr, "replicated: -rate: 1 or more")
		os.Exit(2)
	}

	if *node > 0 {
		log := slog.New(slog.NewTextHandler(os.Stderr, nil))
		signal.Ignore(os.Interrupt) // Ctrl-C reaches all processes; the parent decides
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if err := serve(ctx, &c, *node, os.Stdin, os.Stdout, log); err != nil {
			log.Error("node failed", "err", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	lost, err := run(ctx, c, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "replicated:", err)
	}
	if err != nil || lost {
		os.Exit(1)
	}
}

// run runs the nodes until c.length is over or ctx ends, and then until all tasks are done.
func run(ctx context.Context, c config, out io.Writer) (lost bool, err error) {
	if c.dir == "" {
		if c.dir, err = os.MkdirTemp("", "codeq-replicated-"); err != nil {
			return false, err
		}
		defer func() {
			if err == nil && !lost { // otherwise the directory is kept for inspection
				err = os.RemoveAll(c.dir)
			}
		}()
	} else if err := os.MkdirAll(c.dir, 0o777); err != nil {
		return false, err
	}
	cl := newCluster(&c, out)
	cl.tell("%d nodes in %s", nodes, c.dir)
	if err := cl.run(ctx); err != nil {
		return false, err
	}
	t, err := compare(&c)
	if err != nil {
		return false, err
	}
	cl.tell("%v", t)
	return t.lost > 0, nil
}
