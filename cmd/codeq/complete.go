package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
)

// completeTimeout bounds how long a shell waits for the names of queues.
const completeTimeout = 2 * time.Second

// completeQueues offers the names of the queues to a shell, besides flags. Shells evaluate what
// they are offered: only names of harmless characters are.
func (a *app) completeQueues(ctx context.Context, c *cli.Command) {
	if args := c.Args().Slice(); len(args) > 0 && strings.HasPrefix(args[len(args)-1], "-") {
		cli.DefaultCompleteWithFlags(ctx, c)
		return
	}
	ctx, stop := context.WithTimeout(ctx, completeTimeout)
	defer stop()
	quiet := *a
	quiet.err = nowhere{}
	_ = quiet.withView(ctx, c, func(v view, _ where) error { // without names there is nothing to offer
		list, err := v.Info(ctx)
		for _, q := range list {
			if isHarmless(q.Queue) {
				_, _ = fmt.Fprintln(a.out, q.Queue)
			}
		}
		return err
	})
}

// nowhere takes what is not to be shown.
type nowhere struct{}

func (nowhere) Write(b []byte) (int, error) { return len(b), nil }

// isHarmless reports whether no shell takes a name for more than a word.
func isHarmless(name string) bool {
	return name != "" && name[0] != '-' && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == ""
}
