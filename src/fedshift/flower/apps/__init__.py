"""Parts for Flower apps that exist: a strategy, a mod that keeps local entries, and calls for a loop of one's own.

In: a method and the app's network. Out: messages of Flower's FedAvg, without local entries. To read: ``plans``
(methods in an app's loop), ``strategy`` (server), ``mod`` (client).
"""
