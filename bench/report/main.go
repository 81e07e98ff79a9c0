// Command report measures codeq, and writes the tables and charts of bench/results. In the root of
// the repository:
//
//	go run -C bench/report . COMMAND -out ../results
//
// The commands are peers, engine, scaling and endurance; each has a flag -h.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"codeq/bench/report/internal/endurance"
	"codeq/bench/report/internal/engine"
	"codeq/bench/report/internal/peers"
	"codeq/bench/report/internal/scaling"
)

// command is a verb. declare declares its flags, and returns the function to call after parsing.
type command struct {
	name, purpose string
	declare       func(*flag.FlagSet) func(context.Context) error
}

var commands = []command{
	{"peers", "codeq and other queues under the same load", peers.Declare},
	{"engine", "the benchmarks of codeq, compared by benchstat", engine.Declare},
	{"scaling", "shards, callers, payloads, nodes and backlogs, with profiles", scaling.Declare},
	{"endurance", "speed, memory and disk over a long time", endurance.Declare},
}

func main() {
	c := chosen(os.Args[1:])
	if c == nil {
		fmt.Fprintln(os.Stderr, "usage: report COMMAND [flags]")
		for _, c := range commands {
			fmt.Fprintf(os.Stderr, "  %-10s %s\n", c.name, c.purpose)
		}
		os.Exit(2)
	}
	flags := flag.NewFlagSet(c.name, flag.ExitOnError)
	run := c.declare(flags)
	_ = flags.Parse(os.Args[2:]) // ends the program on an error
	if flags.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "%s has flags only: %q\n", c.name, flags.Args())
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", c.name, err)
		os.Exit(1)
	}
}

// chosen returns the command of the first argument, or nil.
func chosen(args []string) *command {
	for i := range commands {
		if len(args) > 0 && commands[i].name == args[0] {
			return &commands[i]
		}
	}
	return nil
}
