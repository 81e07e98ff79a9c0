//go:build unix

package codeq_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"codeq"
)

// Files of a queue that was not closed, copied one after the other, are refused: they may be of
// different moments. Who knows that nobody wrote them meanwhile, as the process had died, accepts
// them.
func ExampleErrCopied() {
	root, err := os.MkdirTemp("", "")
	check(err)
	defer os.RemoveAll(root)
	q, err := codeq.Open(filepath.Join(root, "queue"), nil)
	check(err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("welcome")})
	check(err)

	moved := filepath.Join(root, "moved") // as by cp -r; nothing writes here at this moment
	check(os.CopyFS(moved, os.DirFS(filepath.Join(root, "queue"))))
	check(q.Close())

	_, err = codeq.Open(moved, nil)
	fmt.Println("refused:", errors.Is(err, codeq.ErrCopied))

	accepted, err := codeq.Open(moved, &codeq.Options{AcceptCopy: true}) // the first time; then it is a queue of its own
	check(err)
	counts, err := accepted.Stats(ctx)
	check(err)
	fmt.Println("ready:", counts["mail"].Ready)
	check(accepted.Close())
	// Output:
	// refused: true
	// ready: 1
}
