module codeq/bench/scaling

go 1.26.0

replace (
	codeq => ../..
	codeq/bench/report => ../report
)
