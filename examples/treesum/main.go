// Command treesum prints the SHA-256 digests of all regular files of a directory tree, sorted by
// name, as
//
//	find TREE -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
//
// does. It is an example of a command-line tool that embeds a task queue: after kill -9 at any
// time, the same command continues, and does not read finished files again.
//
//	treesum [flags] [TREE]
//
//	-workers N       read N files at a time (default: one for each CPU)
//	-queue DIR       keep the queue in DIR
//	-keep            do not remove the queue at the end
//	-durability D    process (default), disk or none
//
// TREE is "." by default. Symbolic links are not followed, TREE itself included; "TREE/" follows
// it.
//
// # The queue
//
// By default the queue lies in treesum/HASH of the user's cache directory, where HASH is a hash of
// the absolute path of TREE. treesum never walks into it. It is removed after all digests are
// printed, even if some files could not be read, so that the next run begins again. After a run
// with -keep, the next one prints the kept digests and reads no file.
//
// With -durability none, the last files finished before kill -9 are read again. With process, the
// same holds for a power loss; with disk, no file is read again.
//
// # Errors
//
// A file or directory that cannot be read is tried three times within a second, and reported on
// standard error at the end. The exit code is 0 after success, 1 if something could not be read, 2
// if treesum itself failed, and 130 after SIGINT or SIGTERM.
//
// # How it works
//
// A task of the queue "walk" is one directory, or the rest of a directory after a name. Its
// completion produces the tasks for the entries in the same commit: either the directory is done
// and its entries are queued, or neither. A task of the queue "hash" is one file, and keeps the
// digest as its result. So the queue always has the exact progress, and treesum is finished when no
// task of either queue is ready, scheduled or leased.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"codeq"
)

const (
	exitUnread      = 1
	exitFailed      = 2
	exitInterrupted = 130
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

type config struct {
	tree       string
	queue      string
	keep       bool
	workers    int
	durability codeq.Durability
}

// parse prints errors itself, as the flag package does.
func parse(args []string, stderr io.Writer) (config, error) {
	c := config{tree: "."}
	flags := flag.NewFlagSet("treesum", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: treesum [flags] [TREE]")
		flags.PrintDefaults()
	}
	flags.IntVar(&c.workers, "workers", runtime.GOMAXPROCS(0), "read `N` files at a time")
	flags.StringVar(&c.queue, "queue", "", "keep the queue in `DIR` (default: in the user's cache directory)")
	flags.BoolVar(&c.keep, "keep", false, "do not remove the queue at the end")
	flags.TextVar(&c.durability, "durability", codeq.DurabilityProcess, "of finished work: process, disk or none")
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	switch {
	case flags.NArg() > 1:
		fmt.Fprintln(stderr, "treesum: more than one tree")
		flags.Usage()
		return c, errors.New("more than one tree")
	case flags.NArg() == 1:
		c.tree = flags.Arg(0)
	}
	return c, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	c, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return exitFailed // parse has printed why
	}
	code, err := c.sum(ctx, stdout, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "treesum:", err)
		return exitFailed
	}
	return code
}

// sum does the remaining work, and prints the results if nothing is left.
func (c *config) sum(ctx context.Context, stdout, stderr io.Writer) (code int, err error) {
	t, err := openTree(c)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, t.queue.Close()) }()
	if err := t.begin(); err != nil {
		return 0, err
	}
	p := newProgress(stderr)
	err = t.work(ctx, c.workers, p)
	p.clear()
	if err != nil {
		return 0, err
	}
	done, left, err := t.state()
	if err != nil {
		return 0, err
	}
	if left > 0 {
		fmt.Fprintf(stderr, "treesum: interrupted with %d files done; the same command goes on from here (queue: %s)\n",
			done, t.dir)
		return exitInterrupted, nil
	}
	unread, err := t.report(stdout, stderr)
	if err != nil {
		return 0, err
	}
	if !c.keep {
		err = t.remove()
	}
	if unread > 0 {
		code = exitUnread
	}
	return code, err
}
