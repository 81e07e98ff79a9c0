package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
)

// completeTimeout bounds the time to complete the names of queues.
const completeTimeout = 2 * time.Second

// completeQueues writes the names of queues for a shell's completion, besides flags. Shells
// evaluate completions: names with other than harmless characters are left out.
func (a *app) completeQueues(ctx context.Context, c *cli.Command) {
	if args := c.Args().Slice(); len(args) > 0 && strings.HasPrefix(args[len(args)-1], "-") {
		cli.DefaultCompleteWithFlags(ctx, c)
		return
	}
	ctx, stop := context.WithTimeout(ctx, completeTimeout)
	defer stop()
	quiet := *a
	quiet.err = nowhere{}
	_ = quiet.withView(ctx, c, func(v view, _ where) error { // no completions after an error
		list, err := v.Info(ctx)
		for _, q := range list {
			if isHarmless(q.Queue) {
				_, _ = fmt.Fprintln(a.out, q.Queue)
			}
		}
		return err
	})
}

// nowhere discards output.
type nowhere struct{}

func (nowhere) Write(b []byte) (int, error) { return len(b), nil }

// isHarmless reports whether a name is a plain word in every shell.
func isHarmless(name string) bool {
	return name != "" && name[0] != '-' && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == ""
}
