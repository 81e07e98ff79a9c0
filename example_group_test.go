package codeq_test

import (
	"errors"
	"fmt"

	"codeq"
)

// The changes of one account are made one after the other, in their order, also
// when one of them has to be tried again; those of other accounts go on meanwhile.
func ExampleTask_group() {
	q, done := open()
	defer done()
	for _, change := range []struct{ account, what string }{
		{"anna", "deposit 10"}, {"anna", "withdraw 5"}, {"bert", "deposit 7"},
	} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "ledger", Group: change.account, Payload: []byte(change.what)})
		check(err)
	}
	ledger := codeq.ClaimRequest{Queues: []string{"ledger"}, NoWait: true}

	deposit, err := q.Claim(ctx, ledger)
	check(err)
	fmt.Printf("%s: %s\n", deposit.Group, deposit.Payload)
	other, err := q.Claim(ctx, ledger)
	check(err)
	fmt.Printf("%s: %s\n", other.Group, other.Payload)

	_, err = q.Claim(ctx, ledger)
	fmt.Println("anna has to wait:", errors.Is(err, codeq.ErrEmpty))

	check(q.Complete(ctx, deposit.Receipt, nil))
	withdrawal, err := q.Claim(ctx, ledger)
	check(err)
	fmt.Printf("%s: %s\n", withdrawal.Group, withdrawal.Payload)
	// Output:
	// anna: deposit 10
	// bert: deposit 7
	// anna has to wait: true
	// anna: withdraw 5
}

// A transfer that fails for good holds up its account until somebody has looked at it,
// since what follows builds on it.
func ExampleSettings_holdGroups() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "ledger", func(s *codeq.Settings) { s.HoldGroups = true }))
	for _, what := range []string{"deposit 10", "withdraw 5"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "ledger", Group: "anna", Payload: []byte(what)})
		check(err)
	}
	ledger := codeq.ClaimRequest{Queues: []string{"ledger"}, NoWait: true}

	deposit, err := q.Claim(ctx, ledger)
	check(err)
	check(q.DeadLetter(ctx, deposit.Receipt, errors.New("no such account")))
	_, err = q.Claim(ctx, ledger)
	fmt.Println("anna has to wait:", errors.Is(err, codeq.ErrEmpty))

	check(q.RedriveDead(ctx, deposit.ID))
	for range 2 {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"ledger"}})
		check(err)
		fmt.Printf("%s\n", l.Payload)
		check(q.Complete(ctx, l.Receipt, nil))
	}
	// Output:
	// anna has to wait: true
	// deposit 10
	// withdraw 5
}
